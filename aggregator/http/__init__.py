"""The dashboard's server: a JSON API, metrics and operator commands over HTTP, in a process of its own."""
