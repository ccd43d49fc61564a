"""The programs beside those that a user would write instead, as whole processes."""
