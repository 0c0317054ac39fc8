"""Reports: the records of a folder as tables in the papers' layout and as pictures."""

from pylongctx.report.page import write_report

__all__ = ["write_report"]
