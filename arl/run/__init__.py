"""The composition root: the only wing that names concrete engines, and the doors through which users start runs.

    train, experiment, script   `arl.train`, `Experiment`, the flags of a script
    inputs                      what a run was given, checked
    launch                      puts a run together: start reading here
    engines, servers, learner   its engines and where they run, its servers, the trainer's process
    dry_run, doctor, export     what would run where; the doctor on a script's experiment; a checkpoint as a model
    finetuning/, replay         training on data; recorded steps again

May import every wing but arl.cli.
"""
