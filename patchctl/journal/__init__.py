"""The host's durable journal: transactions, their steps, and the generations it committed."""
