# METADATA
# title: Is there a way back, and what did memory say
package patchctl.checks.rollback

import data.patchctl.lib.checks

# --- rollback.target: the build a rollback lands on is recorded on this host and still sound

landing := input.patch.base_digest if checks.forward

landing := input.patch.target_digest if checks.rolling_back

listed if {
	some digest in input.rollback.known
	digest == landing
}

results contains checks.pass("rollback.target", "the build to return to is recorded and sound") if {
	input.rollback.target == "recorded"
	listed
}

results contains checks.deny("rollback.target", message) if {
	input.rollback.target == "unknown"
	message := sprintf("build %s is not recorded on this host or its files changed: choose a recorded build", [landing])
}

results contains checks.deny("rollback.target", message) if {
	input.rollback.target == "recorded"
	not listed
	message := sprintf("build %s is not among the builds recorded on this host: choose a recorded build", [landing])
}

# --- rollback.snapshot

snapshot := {
	"present": ["pass", "memory before the change is captured"],
	"missing": [checks.level("snapshot_missing"), "no memory snapshot of the serving build: capture one, then deploy again"],
	"stale": [checks.level("snapshot_stale"), "the memory snapshot is older than the serving generation: capture a new one"],
}

results contains checks.graded("rollback.snapshot", snapshot[input.rollback.snapshot]) if checks.forward

results contains checks.pass("rollback.snapshot", "not needed to return to a recorded build") if checks.rolling_back

# --- memory.verdict: nothing to judge before the swap; after it, only a positive verdict promotes

before := {
	"not_run": ["pass", "memory is judged after the swap"],
	"commit": ["deny", "a memory verdict exists before the swap: another change is in progress, look at the status"],
	"rollback": ["deny", "a memory verdict exists before the swap: another change is in progress, look at the status"],
	"hold": ["deny", "a memory verdict exists before the swap: another change is in progress, look at the status"],
}

# Memory that could not be seen or judged is never safe: the settings choose between a human's eye and a refusal.
unknown := {"pass": "hold", "hold": "hold", "deny": "deny"}[checks.level("memory_unknown")]

after := {
	"commit": ["pass", "memory changed only as declared"],
	"rollback": ["deny", "memory changed where nothing was declared: roll back"],
	"hold": [unknown, "memory changes need a human's eye: read the snapshot report, then promote or roll back"],
	"not_run": [unknown, "memory was not compared: capture and compare, then promote"],
}

results contains checks.graded("memory.verdict", before[input.memory.verdict]) if input.request.action == "apply"

results contains checks.graded("memory.verdict", after[input.memory.verdict]) if input.request.action == "promote"

results contains checks.pass("memory.verdict", "a return to a recorded build is compared afterwards") if checks.rolling_back
