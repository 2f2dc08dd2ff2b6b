package patchctl.testing.evidence_test

import data.patchctl.checks.evidence
import data.patchctl.testing.facts

status_of(id, input_facts) := {result.status | some result in results; result.id == id} if {
	results := evidence.results with input as input_facts with data.patchctl.config as facts.settings
}

test_altered_files_deny_every_action if {
	every start in [facts.apply, facts.promote, facts.rollback] {
		status_of("integrity.files", facts.with_fact(start, "/integrity/files", "mismatch")) == {"deny"}
	}
}

test_missing_evidence_holds_in_production_and_passes_in_the_lab if {
	every path, id in {"/provenance/status": "provenance", "/qualification/status": "qualification"} {
		missing := facts.with_fact(facts.apply, path, "missing")
		status_of(id, missing) == {"hold"}
		status_of(id, facts.with_fact(missing, "/request/environment", "lab")) == {"pass"}
	}
}

test_contradicting_evidence_denies_even_in_the_lab if {
	lab := facts.with_fact(facts.apply, "/request/environment", "lab")
	status_of("provenance", facts.with_fact(lab, "/provenance/status", "invalid")) == {"deny"}
	status_of("qualification", facts.with_fact(lab, "/qualification/status", "failed")) == {"deny"}
}

test_undeclared_change_denies if {
	status_of("declaration", facts.with_fact(facts.apply, "/patch/declaration", "partial")) == {"deny"}
}
