"""What a record tells of an exception: enough to know it by, and no path of the machine."""

from __future__ import annotations

from rlspec.device.told import told


def test_the_first_line_the_place_and_the_end_of_the_traceback(capsys):
    try:
        raise ValueError("no\nmore")
    except ValueError as error:
        found = told(error, "layer 1")
    assert found["message"] == "ValueError: no (layer 1)"
    assert 'File "test_told.py", line' in found["tail"][1] and found["tail"][-1] == "more"
    assert __file__ not in "".join(found["tail"]) and __file__ in capsys.readouterr().err  # the log has all of it


def test_no_place_and_a_long_traceback():
    def deep(count):
        return deep(count - 1) if count else 1 / 0

    try:
        deep(9)
    except ZeroDivisionError as error:
        found = told(error, "")
    assert found["message"] == "ZeroDivisionError: division by zero" and len(found["tail"]) == 6
