package patchctl.testing.rollback_test

import data.patchctl.checks.rollback
import data.patchctl.testing.facts

status_of(id, input_facts) := {result.status | some result in results; result.id == id} if {
	results := rollback.results with input as input_facts with data.patchctl.config as facts.settings
}

test_no_change_without_a_way_back if {
	every start in [facts.apply, facts.promote, facts.rollback] {
		status_of("rollback.target", start) == {"pass"}
		status_of("rollback.target", facts.with_fact(start, "/rollback/known", [])) == {"deny"}
		status_of("rollback.target", facts.with_fact(start, "/rollback/target", "unknown")) == {"deny"}
	}
}

test_only_a_positive_verdict_promotes if {
	status_of("memory.verdict", facts.promote) == {"pass"}
	status_of("memory.verdict", facts.with_fact(facts.promote, "/memory/verdict", "rollback")) == {"deny"}
}

test_unknown_memory_is_what_the_settings_say_and_never_passes if {
	every verdict in ["hold", "not_run"] {
		unknown := facts.with_fact(facts.promote, "/memory/verdict", verdict)
		status_of("memory.verdict", unknown) == {"deny"}
		status_of("memory.verdict", facts.with_fact(unknown, "/request/environment", "lab")) == {"hold"}
	}
}

test_missing_snapshot_denies_in_production if {
	status_of("rollback.snapshot", facts.with_fact(facts.apply, "/rollback/snapshot", "missing")) == {"deny"}
}
