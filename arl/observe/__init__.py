"""What users look at: the event log, the page and the screen, trackers, the doctor, rules of a healthy run.

    events/    writes and reads run_dir/events
    view/      the server and page of `arl view`, the screen of `arl top`, `arl.show`
    tracking   experiment trackers
    doctor/    whether servers and trainer agree
    health/    rules that find what looks wrong in a run, for the console, the view and the end of a run

Looking never changes a run. May import arl.api and arl.runtime; must not import what it looks at, and no torch outside
doctor/.
"""
