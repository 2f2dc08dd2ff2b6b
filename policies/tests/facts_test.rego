# METADATA
# title: Facts and settings that the tests start from
package patchctl.testing.facts

base_build := "sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"

target_build := "sha256:cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc"

# Every check passes.
apply := {
	"now": {"unix": 1000000, "clock": "synced"},
	"request": {"action": "apply", "actor": "uid:1000", "environment": "production"},
	"patch": {
		"manifest_digest": "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
		"patch_id": "fix-9",
		"channel": "stable",
		"sequence": 9,
		"created_unix": 999000,
		"expires_unix": 1009000,
		"author": "alice",
		"base_digest": base_build,
		"target_digest": target_build,
		"engine_kind": "patchctl-torch",
		"declaration": "complete",
	},
	"signature": {
		"status": "verified",
		"subject": "match",
		"domain": "public",
		"issuer": "https://issuer.example",
		"identity": "release@example",
		"signed_at_unix": 999100,
	},
	"signing_time": {"status": "verified"},
	"transparency": {"status": "included"},
	"ledger": {"highest_sequence": 8, "applied_ids": ["fix-8"]},
	"target": {
		"engine_kind": "patchctl-torch",
		"running_digest": base_build,
		"name": "engine-0",
		"health": "healthy",
		"memory": "sufficient",
	},
	"integrity": {"files": "match", "atomicity": "atomic"},
	"provenance": {"status": "verified"},
	"qualification": {"status": "passed"},
	"rollback": {"known": [base_build], "target": "recorded", "snapshot": "present"},
	"memory": {"verdict": "not_run"},
}

promote := json.patch(apply, [
	{"op": "replace", "path": "/request/action", "value": "promote"},
	{"op": "replace", "path": "/target/running_digest", "value": target_build},
	{"op": "replace", "path": "/ledger/highest_sequence", "value": 9},
	{"op": "replace", "path": "/memory/verdict", "value": "commit"},
])

# Only what a rollback may rest on.
rollback := json.patch(apply, [
	{"op": "replace", "path": "/request/action", "value": "rollback"},
	{"op": "replace", "path": "/patch/base_digest", "value": target_build},
	{"op": "replace", "path": "/patch/target_digest", "value": base_build},
	{"op": "replace", "path": "/patch/expires_unix", "value": 999001},
	{"op": "replace", "path": "/ledger/highest_sequence", "value": 9},
	{"op": "replace", "path": "/signature/status", "value": "absent"},
	{"op": "replace", "path": "/transparency/status", "value": "missing"},
	{"op": "replace", "path": "/target/health", "value": "unhealthy"},
])

settings := {
	"identities": [{
		"domain": "public",
		"issuer": "https://issuer.example",
		"identity": "release@example",
		"channels": ["stable"],
	}],
	"environments": {
		"production": {"domains": ["public"], "levels": strict},
		"staging": {"domains": ["public", "local"], "levels": strict},
		"lab": {"domains": ["public", "local"], "levels": lenient},
	},
	"declaration_partial": "deny",
	"clock_skew_s": 300,
}

strict := {
	"clock_unsynced": "hold",
	"memory_unknown": "deny",
	"provenance_missing": "hold",
	"qualification_missing": "hold",
	"qualification_stale": "hold",
	"signing_time_missing": "hold",
	"snapshot_missing": "deny",
	"snapshot_stale": "hold",
	"transparency_missing": "hold",
	"transparency_unreachable": "hold",
}

lenient := {level: "pass" | some level, kept in strict; kept != ""}

with_fact(facts, path, value) := json.patch(facts, [{"op": "replace", "path": path, "value": value}])
