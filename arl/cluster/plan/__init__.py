"""What a run would do on other machines, before they are rented: `arl plan`.

fitting.py (a run's event log) or gpus.py (a guess) --> costs.py --> steady_state.py --> prediction.py --> plan_text.py

May read the event log; must not import the parts that it predicts.
"""
