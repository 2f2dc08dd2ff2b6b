"""The Rego policy package, shipped as package data: an OPA bundle folder, read by ``patchctl.admission.policy``."""
