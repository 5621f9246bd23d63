"""Several policies in one run, behind the contracts of one: learners, servers and weights, told apart by role.

batch --split by role--> a learner for each policy --all at version t+1--> weights of each --> its servers
request --role--> the engine of its policy
"""
