# METADATA
# title: Admission of a change to a live engine
# description: >-
#   Positive evidence only. Each check reports pass, hold or deny; a required check that reports
#   nothing, or anything else, is a deny. Deny beats hold, hold beats allow.
# entrypoint: true
package patchctl.gate

import data.patchctl.checks.authenticity
import data.patchctl.checks.evidence
import data.patchctl.checks.replay
import data.patchctl.checks.rollback
import data.patchctl.checks.target

required := {
	"clock",
	"declaration",
	"integrity.atomicity",
	"integrity.files",
	"memory.verdict",
	"patch.id",
	"patch.sequence",
	"patch.validity",
	"provenance",
	"qualification",
	"rollback.snapshot",
	"rollback.target",
	"signature.domain",
	"signature.identity",
	"signature.subject",
	"signature.verified",
	"signing.time",
	"target.base",
	"target.engine",
	"target.health",
	"target.memory",
	"transparency",
}

results := ((authenticity.results | evidence.results) | (replay.results | rollback.results)) | target.results

with_status(status) := {{"id": result.id, "message": result.message} |
	some result in results
	result.status == status
}

passed := with_status("pass")

held := with_status("hold")

heard := {result.id | some result in ((passed | held) | with_status("deny"))}

silent := {{"id": id, "message": "this check said nothing; the policy or its settings are incomplete, restore them"} |
	some id in (required - heard)
}

unreadable := {{"id": result.id, "message": "this check reported neither pass, hold nor deny; correct its level in the settings"} |
	some result in results
	count({result.status} - {"pass", "hold", "deny"}) == 1
}

denied := with_status("deny") | (silent | unreadable)

default outcome := "deny"

outcome := "hold" if {
	count(denied) == 0
	count(held) > 0
}

outcome := "allow" if {
	count(denied) == 0
	count(held) == 0
	count(passed) > 0
}

decision := {"outcome": outcome, "denied": denied, "held": held, "passed": passed}
