"""The Rego policy package, shipped as package data."""
