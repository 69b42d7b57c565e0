"""The systems Octavo is compared with: each in an environment of its own, behind one worker protocol."""
