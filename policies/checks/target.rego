# METADATA
# title: Does the patch fit the engine that runs now, and can that engine take it
package patchctl.checks.target

import data.patchctl.lib.checks

applying if input.request.action == "apply"

promoting if input.request.action == "promote"

# --- target.engine: judged on every action

results contains checks.pass("target.engine", "made for this engine") if {
	input.patch.engine_kind == input.target.engine_kind
}

results contains checks.deny("target.engine", message) if {
	input.patch.engine_kind != input.target.engine_kind
	message := sprintf(
		"made for engine %s but %s runs %s: deploy the patch of that engine",
		[input.patch.engine_kind, input.target.name, input.target.engine_kind],
	)
}

# --- target.base: an apply starts from the base build, a promote keeps the target build

results contains checks.pass("target.base", "the base build is serving") if {
	applying
	input.target.running_digest == input.patch.base_digest
}

results contains checks.deny("target.base", message) if {
	applying
	input.target.running_digest != input.patch.base_digest
	message := sprintf(
		"needs base %s but %s serves %s: build the patch against that build",
		[input.patch.base_digest, input.target.name, input.target.running_digest],
	)
}

results contains checks.pass("target.base", "the target build is serving") if {
	promoting
	input.target.running_digest == input.patch.target_digest
}

results contains checks.deny("target.base", message) if {
	promoting
	input.target.running_digest != input.patch.target_digest
	message := sprintf(
		"%s serves %s, not the build to promote: look at its status before anything else",
		[input.target.name, input.target.running_digest],
	)
}

results contains checks.pass("target.base", "a return to a recorded build may start anywhere") if checks.rolling_back

# --- target.health

health := {
	"healthy": ["pass", "the engine is healthy"],
	"unhealthy": ["deny", "the engine is unhealthy: roll back or repair it before changing it"],
	"unknown": ["hold", "the engine's health is unknown: look at its status"],
}

results contains checks.graded("target.health", health[input.target.health]) if checks.forward

results contains checks.pass("target.health", "a return to a recorded build is the repair") if checks.rolling_back

# --- target.memory

memory := {
	"sufficient": ["pass", "a second generation fits beside the serving one"],
	"short": ["deny", "a second generation does not fit: lower the KV budget or free device memory, then try again"],
	"unknown": ["hold", "free device memory is unknown: look at the engine's status"],
}

results contains checks.graded("target.memory", memory[input.target.memory]) if applying

results contains checks.pass("target.memory", "both generations are loaded") if promoting

results contains checks.pass("target.memory", "staging the recorded build finds out by itself") if checks.rolling_back
