import gateway from './gateway.js'

export const { bodyOf, errorBody, promptOf, selectFor, EngineTokenizer, UsageReader, Booking, Cooldown } = gateway
export default gateway
