"""Names of the kinds in this package, for configurations. This module imports no torch, so that a wrong key fails at once."""

GROUP_KINDS = ("grpo", "dr_grpo", "rloo", "reinforce_baseline")
KL_KINDS = ("k1", "k2", "k3", "abs")
CORRECTIONS = ("tis", "icepop", "sequence_mask")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant")
REWARD_MODEL_LOSSES = ("sigmoid", "logexp")
DPO_LOSSES = ("sigmoid", "ipo")
