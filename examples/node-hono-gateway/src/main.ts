// node dist/src/main.js gateway.json
import { readFileSync } from 'node:fs'

import { serve, type ServerOptions } from './server.js'

const [file] = process.argv.slice(2)
if (!file) throw new Error('the configuration is missing: node dist/src/main.js gateway.json')
const options = JSON.parse(readFileSync(file, 'utf8')) as ServerOptions
const server = await serve(options)
console.log(`serving /v1/ on port ${server.port} with ${options.workers.length} workers`)

for (const signal of ['SIGINT', 'SIGTERM'] as const) {
  process.once(signal, () => void server.stop(30_000))
}
