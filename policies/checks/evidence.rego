# METADATA
# title: Is the build what was tested, whole, and only what was declared
package patchctl.checks.evidence

import data.patchctl.lib.checks

# --- integrity.files: judged on every action, bytes are about to be run

files := {
	"match": ["pass", "every file has its signed digest"],
	"mismatch": ["deny", "files differ from their signed digests: fetch the patch again, and check this disk"],
}

results contains checks.graded("integrity.files", files[input.integrity.files])

# --- integrity.atomicity

atomicity := {
	"atomic": ["pass", "the patch holds every file of the target build for every rank"],
	"partial": ["deny", "the patch lacks files of its target build: build it again"],
}

results contains checks.graded("integrity.atomicity", atomicity[input.integrity.atomicity]) if checks.forward

results contains checks.pass("integrity.atomicity", "a recorded build is whole") if checks.rolling_back

# --- declaration

declaration := {
	"complete": ["pass", "the change touches only what it declares"],
	"partial": [
		checks.config.declaration_partial,
		"the change touches tensors or files that its declaration leaves out: declare them and sign again",
	],
}

results contains checks.graded("declaration", declaration[input.patch.declaration]) if checks.forward

results contains checks.pass("declaration", "a return to a recorded build declares nothing") if checks.rolling_back

# --- provenance

provenance := {
	"verified": ["pass", "built by an allowed builder from an allowed source"],
	"missing": [checks.level("provenance_missing"), "no provenance: attest the build in the release job"],
	"invalid": ["deny", "wrong builder or source: build it in the release job"],
}

results contains checks.graded("provenance", provenance[input.provenance.status]) if checks.forward

results contains checks.on_rollback("provenance", input.provenance.status, {"invalid"}) if checks.rolling_back

# --- qualification

qualification := {
	"passed": ["pass", "the qualification results are within limits"],
	"failed": ["deny", "the qualification results exceed their limits: correct the patch"],
	"missing": [checks.level("qualification_missing"), "not qualified: run the qualification suite and attest its result"],
	"stale": [checks.level("qualification_stale"), "qualified too long ago or for another base: run the suite again"],
}

results contains checks.graded("qualification", qualification[input.qualification.status]) if checks.forward

results contains checks.on_rollback("qualification", input.qualification.status, {"failed"}) if checks.rolling_back
