"""Enrollment and the fleet's PKI: identities, certificates and the broker's access list."""
