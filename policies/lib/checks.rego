# METADATA
# title: What the checks share
# description: how a check reports, which action is judged, and what the settings say
package patchctl.lib.checks

pass(id, message) := {"id": id, "status": "pass", "message": message}

hold(id, message) := {"id": id, "status": "hold", "message": message}

deny(id, message) := {"id": id, "status": "deny", "message": message}

# A fact looked up in a table of [status, message].
graded(id, row) := {"id": id, "status": row[0], "message": row[1]}

# A build that the host never ran is about to serve, or to stay.
forward if input.request.action == "apply"

forward if input.request.action == "promote"

rolling_back if input.request.action == "rollback"

# A rollback lands on a build that this host verified and recorded, so evidence that is missing today
# does not block it. Evidence that contradicts the record does.
on_rollback(id, fact, contradictions) := pass(id, "not needed to return to a recorded build") if {
	count({fact} - contradictions) == 1
}

on_rollback(id, fact, contradictions) := deny(id, message) if {
	count({fact} & contradictions) == 1
	message := sprintf("recorded evidence no longer holds (%s): do not return to this build, choose another recorded one", [fact])
}

# Rego orders values of different types, null below every number: compare numbers only.
numbers(values) if {
	every value in values {
		is_number(value)
	}
}

config := data.patchctl.config

environment := config.environments[input.request.environment]

level(kind) := environment.levels[kind]
