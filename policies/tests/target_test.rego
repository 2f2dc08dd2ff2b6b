package patchctl.testing.target_test

import data.patchctl.checks.target
import data.patchctl.testing.facts

status_of(id, input_facts) := {result.status | some result in results; result.id == id} if {
	results := target.results with input as input_facts with data.patchctl.config as facts.settings
}

test_another_engine_denies_every_action if {
	every start in [facts.apply, facts.promote, facts.rollback] {
		status_of("target.engine", facts.with_fact(start, "/target/engine_kind", "other")) == {"deny"}
	}
}

test_apply_starts_from_the_base_build if {
	status_of("target.base", facts.apply) == {"pass"}
	status_of("target.base", facts.with_fact(facts.apply, "/target/running_digest", facts.target_build)) == {"deny"}
}

test_promote_keeps_the_target_build if {
	status_of("target.base", facts.promote) == {"pass"}
	status_of("target.base", facts.with_fact(facts.promote, "/target/running_digest", facts.base_build)) == {"deny"}
}

test_unhealthy_engine_is_rolled_back_but_not_changed if {
	status_of("target.health", facts.with_fact(facts.apply, "/target/health", "unhealthy")) == {"deny"}
	status_of("target.health", facts.rollback) == {"pass"}
}

test_unknown_headroom_holds if {
	status_of("target.memory", facts.with_fact(facts.apply, "/target/memory", "unknown")) == {"hold"}
}
