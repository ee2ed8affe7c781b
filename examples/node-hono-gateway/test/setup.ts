import type { TestContext } from 'node:test'

import { startEngine, type Start } from 'kvlane-example-testing'

import { serve, type GatewayServer, type ServerOptions } from '../src/server.js'

/** The gateway before two engines. */
export const start: Start = async (t, { speed = 4, model = 'sim', ...options } = {}) => {
  const engines = await Promise.all(['w1', 'w2'].map((id) => startEngine(t, id, { speed, model })))
  const workers = engines.map(({ id, url, events, replay, kvBlocks }) => ({ id, url, events, replay, kvCapacityBlocks: kvBlocks }))
  const server = await gateway(t, { workers, ...options })
  return { engines, url: `http://127.0.0.1:${server.port}`, router: server.gateway.router, stop: server.stop }
}

/** The gateway alone. */
export async function gateway(t: TestContext, options: Omit<ServerOptions, 'port'>): Promise<GatewayServer> {
  const server = await serve({ hostname: '127.0.0.1', port: 0, router: { seed: 1 }, ...options })
  let stopped: Promise<void> | undefined
  const stop = (graceMs?: number) => (stopped ??= server.stop(graceMs))
  t.after(() => stop())
  return { ...server, stop }
}
