"""Losses: one a file. All are sums over tokens, so that they do not depend on how a batch is split."""
