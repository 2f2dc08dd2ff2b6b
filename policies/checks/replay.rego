# METADATA
# title: Is this patch new, in order and in its time
# description: a rollback to a recorded build is exempt from sequence and expiry
package patchctl.checks.replay

import data.patchctl.lib.checks

applying if input.request.action == "apply"

promoting if input.request.action == "promote"

# --- clock

clock := {
	"synced": ["pass", "the clock is synchronised"],
	"unsynced": [checks.level("clock_unsynced"), "the clock is not synchronised: start time synchronisation on this host"],
	"behind": ["deny", "the clock is behind the newest ledger entry: correct this host's time"],
}

results contains checks.graded("clock", clock[input.now.clock]) if checks.forward

results contains checks.pass("clock", "not needed to return to a recorded build") if checks.rolling_back

# --- patch.sequence

results contains checks.pass("patch.sequence", "newer than everything accepted here") if {
	applying
	checks.numbers([input.patch.sequence, input.ledger.highest_sequence])
	input.patch.sequence > input.ledger.highest_sequence
}

results contains checks.deny("patch.sequence", message) if {
	applying
	input.patch.sequence <= input.ledger.highest_sequence
	message := sprintf(
		"sequence %d is not above %d, already accepted here: release with a higher one, or use rollback to go back",
		[input.patch.sequence, input.ledger.highest_sequence],
	)
}

results contains checks.pass("patch.sequence", "nothing newer was accepted since it was applied") if {
	promoting
	checks.numbers([input.patch.sequence, input.ledger.highest_sequence])
	input.patch.sequence >= input.ledger.highest_sequence
}

results contains checks.deny("patch.sequence", message) if {
	promoting
	input.patch.sequence < input.ledger.highest_sequence
	message := sprintf(
		"sequence %d was superseded by %d: roll back, or promote the newer patch",
		[input.patch.sequence, input.ledger.highest_sequence],
	)
}

results contains checks.pass("patch.sequence", "a return to a recorded build is exempt") if checks.rolling_back

# --- patch.id

results contains checks.pass("patch.id", "not applied here before") if {
	applying
	is_string(input.patch.patch_id)
	is_array(input.ledger.applied_ids)
	every id in input.ledger.applied_ids {
		is_string(id)
	}
	count({input.patch.patch_id} - {id | some id in input.ledger.applied_ids}) == 1
}

results contains checks.deny("patch.id", "this patch was applied here before: release a new one, or use rollback") if {
	applying
	some id in input.ledger.applied_ids
	id == input.patch.patch_id
}

results contains checks.pass("patch.id", "the applied patch is promoted") if promoting

results contains checks.pass("patch.id", "a return to a recorded build is exempt") if checks.rolling_back

# --- patch.validity: created <= now < expires, half-open; a promote keeps what was applied in time

created if {
	checks.numbers([input.patch.created_unix, input.now.unix])
	input.patch.created_unix <= input.now.unix + checks.config.clock_skew_s
}

in_time if {
	created
	checks.numbers([input.patch.expires_unix])
	input.patch.created_unix < input.patch.expires_unix
	input.now.unix < input.patch.expires_unix
}

results contains checks.pass("patch.validity", "inside its validity") if {
	applying
	in_time
}

results contains checks.pass("patch.validity", "applied inside its validity") if {
	promoting
	created
}

results contains checks.deny("patch.validity", "created in the future: correct this host's clock or the release job's") if {
	checks.forward
	input.patch.created_unix > input.now.unix + checks.config.clock_skew_s
}

results contains checks.deny("patch.validity", "it expires before it begins: release it again") if {
	applying
	input.patch.created_unix >= input.patch.expires_unix
}

results contains checks.deny("patch.validity", "expired: have the release job sign it again with a new expiry") if {
	applying
	input.now.unix >= input.patch.expires_unix
}

results contains checks.pass("patch.validity", "a return to a recorded build is exempt") if checks.rolling_back
