"""The settings of a run, one section for each component that reads them. `run` holds the whole: Config.

`sections` reads flags and files into them and says what is wrong; `presets` are named algorithms. A setting that its
backend cannot honour is an error here, before anything starts.
"""
