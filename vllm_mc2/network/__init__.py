"""Peers on other hosts: sessions over TCP between those who know a secret, and reads of a peer's pool by a transfer engine."""
