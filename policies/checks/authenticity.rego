# METADATA
# title: Who made this patch, and can it be proven
package patchctl.checks.authenticity

import data.patchctl.lib.checks

# --- signature.verified

signature := {
	"verified": ["pass", "the signature verifies"],
	"failed": ["deny", "the signature does not verify: do not use this file, fetch it again from the release job"],
	"absent": ["deny", "the patch is not signed: sign it in the release job, then deploy again"],
}

results contains checks.graded("signature.verified", signature[input.signature.status]) if checks.forward

results contains checks.on_rollback("signature.verified", input.signature.status, {"failed"}) if checks.rolling_back

# --- signature.subject

subject := {
	"match": ["pass", "the signature is over this patch file"],
	"mismatch": ["deny", "the signature is over another file: fetch patch and signature together again"],
	"absent": ["deny", "the signature names no file: sign the patch again in the release job"],
}

results contains checks.graded("signature.subject", subject[input.signature.subject]) if checks.forward

results contains checks.on_rollback("signature.subject", input.signature.subject, {"mismatch"}) if checks.rolling_back

# --- signature.identity: domain, issuer and identity together, for this channel

signer_allowed if {
	some allowed in checks.config.identities
	allowed.domain == input.signature.domain
	allowed.issuer == input.signature.issuer
	allowed.identity == input.signature.identity
	some channel in allowed.channels
	channel == input.patch.channel
}

results contains checks.pass("signature.identity", "the signer may release on this channel") if {
	checks.forward
	signer_allowed
}

results contains checks.deny("signature.identity", message) if {
	checks.forward
	not signer_allowed
	message := sprintf(
		"identity %s of issuer %s in trust domain %s may not release on channel %s: have an allowed identity sign, or add this one to the policy settings",
		[input.signature.identity, input.signature.issuer, input.signature.domain, input.patch.channel],
	)
}

results contains checks.pass("signature.identity", "not needed to return to a recorded build") if checks.rolling_back

# --- signature.domain

# Whoever reads the keys of the embedded domain is every identity in it.
local_kept_out if input.signature.domain != "local"

local_kept_out if input.request.environment != "production"

domain_allowed if {
	local_kept_out
	some domain in checks.environment.domains
	domain == input.signature.domain
}

results contains checks.pass("signature.domain", "signatures of this trust domain count in this environment") if {
	checks.forward
	domain_allowed
}

results contains checks.deny("signature.domain", message) if {
	checks.forward
	local_kept_out
	not domain_allowed
	message := sprintf(
		"signatures of trust domain %s do not count in %s: sign with a domain that the policy settings list",
		[input.signature.domain, input.request.environment],
	)
}

results contains checks.deny("signature.domain", message) if {
	checks.forward
	not local_kept_out
	message := "the local trust domain is for laboratories, whatever the settings say: sign with a public or private one"
}

results contains checks.pass("signature.domain", "not needed to return to a recorded build") if checks.rolling_back

# --- signing.time

signing_time := {
	"verified": ["pass", "a trusted timestamp says when it was signed"],
	"missing": [
		checks.level("signing_time_missing"),
		"no trusted timestamp: sign again with a timestamp authority",
	],
	"invalid": ["deny", "the timestamp does not verify: do not use this file, sign again"],
}

results contains checks.graded("signing.time", signing_time[input.signing_time.status]) if {
	checks.forward
	checks.numbers([input.signature.signed_at_unix])
	input.signature.signed_at_unix <= input.now.unix + checks.config.clock_skew_s
}

results contains checks.deny("signing.time", "it was signed in the future: correct this host's clock or the signer's") if {
	checks.forward
	input.signature.signed_at_unix > input.now.unix + checks.config.clock_skew_s
}

results contains checks.on_rollback("signing.time", input.signing_time.status, {"invalid"}) if checks.rolling_back

# --- transparency

transparency := {
	"included": ["pass", "the log includes the signature"],
	"missing": [checks.level("transparency_missing"), "no log entry is bundled: sign again with a transparency log"],
	"unreachable": [
		checks.level("transparency_unreachable"),
		"the log did not answer and no proof is bundled: try again, or bundle the proof when signing",
	],
	"invalid": ["deny", "the log's proof does not verify: do not use this file, report it"],
}

results contains checks.graded("transparency", transparency[input.transparency.status]) if checks.forward

results contains checks.on_rollback("transparency", input.transparency.status, {"invalid"}) if checks.rolling_back
