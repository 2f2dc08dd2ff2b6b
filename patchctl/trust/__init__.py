"""Who signed a patch, and may that still be believed: signing, verification, freshness.

The only package that imports sigstore. That import costs half a second of CPU, so the light modules
(:mod:`~patchctl.trust.statement`, :mod:`~patchctl.trust.freshness`, :mod:`~patchctl.trust.verify`,
:mod:`~patchctl.trust.attestations`, :mod:`~patchctl.trust.sign`) load it inside the function that needs it.

Start reading at :mod:`~patchctl.trust.verify`, the numbered procedure.
"""
