"""The policy gate: facts in, allow, deny or hold out. Sole importer of regorus and opa_client."""
