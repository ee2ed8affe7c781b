import kvlane from './index.js'

export const { Router, Lease, blockHashes, errorCodes, version, __napiBindingTarget } = kvlane
export default kvlane
