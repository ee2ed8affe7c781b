import { once } from 'node:events'
import type { Server } from 'node:http'
import type { AddressInfo } from 'node:net'

import { createAdaptorServer } from '@hono/node-server'

import { Gateway, type GatewayOptions } from './gateway.js'

/** What a server is made of. */
export interface ServerOptions extends GatewayOptions {
  hostname?: string
  /** 0 lets the system choose. */
  port: number
}

/** A running gateway. */
export interface GatewayServer {
  gateway: Gateway
  port: number
  /** Takes nothing new, lets open requests finish for so long, and ends. */
  stop(graceMs?: number): Promise<void>
}

export async function serve({ hostname = '0.0.0.0', port, ...options }: ServerOptions): Promise<GatewayServer> {
  const gateway = new Gateway(options)
  const server = createAdaptorServer({ fetch: gateway.app.fetch }) as Server
  server.listen(port, hostname)
  await once(server, 'listening')
  return {
    gateway,
    port: (server.address() as AddressInfo).port,
    async stop(graceMs = 0) {
      const closed = once(server, 'close')
      server.close()
      const end = performance.now() + graceMs
      // A connection that becomes idle is kept for its next request, which will not be served.
      const closing = setInterval(() => (performance.now() < end ? server.closeIdleConnections() : server.closeAllConnections()), 20)
      await closed
      clearInterval(closing)
      await gateway.close()
    },
  }
}
