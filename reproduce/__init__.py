"""Recomputes the figures, tables and claims of published papers with joulery.

``python -m reproduce clover|green|igniter|muserve|smaragdine`` prints every claim, joulery's figure and a verdict. The
package uses joulery; joulery never imports it, and the wheel does not contain it.
"""
