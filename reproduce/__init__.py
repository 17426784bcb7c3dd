"""The papers' figures, tables and claims, computed again.

``python -m reproduce clover|green|igniter|muserve|smaragdine`` prints every claim, joulery's figure and a verdict. This
package stands beside the product: it uses joulery, joulery never imports it, and the wheel does not hold it.
"""
