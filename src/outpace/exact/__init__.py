"""Pure rules with enumerated proofs: noise, sampling, logit rules, drafts, verification. No I/O, no clock."""
