"""Episodes of several turns between the policy and an environment."""
