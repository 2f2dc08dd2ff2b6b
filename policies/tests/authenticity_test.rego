package patchctl.testing.authenticity_test

import data.patchctl.checks.authenticity
import data.patchctl.testing.facts

status_of(id, input_facts) := {result.status | some result in results; result.id == id} if {
	results := authenticity.results with input as input_facts with data.patchctl.config as facts.settings
}

test_failed_signature_denies if {
	status_of("signature.verified", facts.with_fact(facts.apply, "/signature/status", "failed")) == {"deny"}
}

test_absent_signature_denies if {
	status_of("signature.verified", facts.with_fact(facts.apply, "/signature/status", "absent")) == {"deny"}
}

test_identity_needs_domain_issuer_and_identity_together if {
	every path in ["/signature/domain", "/signature/issuer", "/signature/identity", "/patch/channel"] {
		status_of("signature.identity", facts.with_fact(facts.apply, path, "other")) == {"deny"}
	}
}

test_empty_identity_is_nobody if {
	status_of("signature.identity", facts.with_fact(facts.apply, "/signature/identity", "")) == {"deny"}
}

test_local_domain_never_counts_in_production if {
	local := facts.with_fact(facts.apply, "/signature/domain", "local")
	listed := facts.with_fact(facts.settings, "/environments/production/domains", ["local"])
	results := authenticity.results with input as local with data.patchctl.config as listed
	some result in results
	result.id == "signature.domain"
	result.status == "deny"
}

test_future_signature_denies_although_its_time_is_verified if {
	future := facts.with_fact(facts.apply, "/signature/signed_at_unix", 1000301)
	status_of("signing.time", future) == {"deny"}
}

test_rollback_needs_no_signature_but_heeds_a_failed_one if {
	status_of("signature.verified", facts.rollback) == {"pass"}
	status_of("signature.verified", facts.with_fact(facts.rollback, "/signature/status", "failed")) == {"deny"}
}
