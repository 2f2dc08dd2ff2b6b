package patchctl.testing.gate_test

import data.patchctl.gate
import data.patchctl.testing.facts

ids(findings) := {finding.id | some finding in findings}

decide(input_facts, settings) := decision if {
	decision := gate.decision with input as input_facts with data.patchctl.config as settings
}

test_apply_with_all_evidence_is_allowed if {
	decision := decide(facts.apply, facts.settings)
	decision.outcome == "allow"
	ids(decision.passed) == gate.required
}

test_promote_with_all_evidence_is_allowed if decide(facts.promote, facts.settings).outcome == "allow"

test_rollback_on_the_record_alone_is_allowed if {
	decision := decide(facts.rollback, facts.settings)
	decision.outcome == "allow"
	ids(decision.passed) == gate.required
}

test_no_facts_deny_every_check if {
	decision := decide({}, facts.settings)
	decision.outcome == "deny"
	count(gate.required - ids(decision.denied)) == 0
}

test_no_settings_deny if decide(facts.apply, {}).outcome == "deny"

test_unknown_action_denies if {
	decide(facts.with_fact(facts.apply, "/request/action", "install"), facts.settings).outcome == "deny"
}

test_unknown_environment_denies if {
	decide(facts.with_fact(facts.apply, "/request/environment", "prod"), facts.settings).outcome == "deny"
}

test_unknown_status_denies if {
	decision := decide(facts.with_fact(facts.apply, "/transparency/status", "probably"), facts.settings)
	decision.outcome == "deny"
	ids(decision.denied) == {"transparency"}
}

test_misspelt_level_denies if {
	settings := facts.with_fact(facts.settings, "/environments/production/levels/provenance_missing", "Pass")
	decision := decide(facts.with_fact(facts.apply, "/provenance/status", "missing"), settings)
	decision.outcome == "deny"
	ids(decision.denied) == {"provenance"}
}

test_deny_beats_hold if {
	one := facts.with_fact(facts.apply, "/provenance/status", "missing")
	decision := decide(facts.with_fact(one, "/integrity/files", "mismatch"), facts.settings)
	decision.outcome == "deny"
	ids(decision.held) == {"provenance"}
}

test_hold_beats_allow if {
	decision := decide(facts.with_fact(facts.apply, "/provenance/status", "missing"), facts.settings)
	decision.outcome == "hold"
	count(decision.denied) == 0
}
