"""What a run would do on other machines, before they are rented: `arl plan`.

a run's event log --fitting.py--> costs.py, which may also guess --> steady_state.py --> prediction.py --> text, plot

May read the event log; must not import the parts that it predicts.
"""
