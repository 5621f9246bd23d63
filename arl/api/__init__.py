"""Contracts: records, protocols, settings and errors, and the scripted engines that tests use.

Everything else in arl imports from here; this imports nothing of arl, and no torch. A change here is one for all wings.
"""
