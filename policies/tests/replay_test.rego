package patchctl.testing.replay_test

import data.patchctl.checks.replay
import data.patchctl.testing.facts

status_of(id, input_facts) := {result.status | some result in results; result.id == id} if {
	results := replay.results with input as input_facts with data.patchctl.config as facts.settings
}

test_sequence_must_grow if {
	every sequence in [0, 1, 8] {
		status_of("patch.sequence", facts.with_fact(facts.apply, "/patch/sequence", sequence)) == {"deny"}
	}
	status_of("patch.sequence", facts.with_fact(facts.apply, "/patch/sequence", 10)) == {"pass"}
}

test_applied_id_denies if {
	status_of("patch.id", facts.with_fact(facts.apply, "/ledger/applied_ids", ["fix-1", "fix-9"])) == {"deny"}
}

test_validity_is_half_open if {
	status_of("patch.validity", facts.with_fact(facts.apply, "/now/unix", 1008999)) == {"pass"}
	status_of("patch.validity", facts.with_fact(facts.apply, "/now/unix", 1009000)) == {"deny"}
}

test_rollback_is_exempt_from_sequence_and_expiry if {
	every id in ["clock", "patch.id", "patch.sequence", "patch.validity"] {
		status_of(id, facts.rollback) == {"pass"}
	}
}

test_superseded_patch_is_not_promoted if {
	status_of("patch.sequence", facts.promote) == {"pass"}
	status_of("patch.sequence", facts.with_fact(facts.promote, "/ledger/highest_sequence", 10)) == {"deny"}
}
