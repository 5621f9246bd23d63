"""Episodes in worker processes (rollout.num_workers), where one event loop is not enough for a workflow's own code.

    controller's process                                   a worker process
    EpisodeRunner -> EpisodeWorkers --Play, Stop---------> the workflow: turns, templates, tools, rewards
    RemoteInferenceEngine <--------------Request, Drop------- its `engine`
                       ---------------Answered-----------> a response, or the engine's error
    trajectories, an error <----------Ended--------------- arun_episode returned, raised or was cancelled

A worker keeps no state of servers, and decides nothing: its requests are sampled by the one engine of the controller's
process, as if the episode ran there. So the line of requests, versions, retries, time limits and the checks of what an
episode returns are those of a run without workers. messages.py carries the messages, pool.py is the controller's
side, which starts, watches and ends workers, and worker.py the worker's.
"""
