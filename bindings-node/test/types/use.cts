// Compiled with `tsc --strict`, as CommonJS. Not run.
import kvlane = require('../../index.js')

const router: kvlane.Router = new kvlane.Router()
const lease: kvlane.Lease | null = router.select(Uint32Array.of(1))
lease?.release()
lease?.[Symbol.dispose]()
router[Symbol.dispose]()
