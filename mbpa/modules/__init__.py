"""The user's network: splitting it, sharing its weights, running its head, adding rows to it."""
