import gateway from './gateway.js'

export const { promptOf, selectFor, EngineTokenizer, UsageReader, Booking, Cooldown } = gateway
export default gateway
