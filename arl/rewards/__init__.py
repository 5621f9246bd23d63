"""Ready-made rewards; each is something for as_reward, WeightedReward or a workflow's `reward`.

| module | rewards |
|---|---|
| answers | exact and numeric match, tags, JSON, regular expressions |
| mathematics | answers compared as mathematics, by math-verify |
| gym | reasoning-gym's examples and its own scorers for them |
| unit_tests | programs run against tests, in a sandbox |
| judge | a language model's score, over any OpenAI-compatible URL |

What they are made of is in arl.rewards.adapt.
"""
