"""Fuzzing of everything that reads what a peer, a client or a configuration says. See docs/fuzzing.md."""
