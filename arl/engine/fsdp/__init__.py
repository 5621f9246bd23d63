"""The train engine on FSDP2, over one process or over many Ray actors behind the same contract.

    FSDPTrainEngine   one rank: model, packing, attention, optimizer, checkpoints, snapshots
    RayTrainEngine    many ranks: divides each minibatch, and calls an FSDPTrainEngine on each

Only `arl.run.launch` builds engines; everything else talks to `arl.api.train_engine.TrainEngine`. This package imports
`arl.api`, `arl.algorithm` and `arl.engine.weights`, and nothing of workflows, rollouts, the trainer or clients.
"""
