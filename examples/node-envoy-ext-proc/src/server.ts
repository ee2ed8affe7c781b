import { once } from 'node:events'

import { Server, ServerCredentials, type ServerDuplexStream } from '@grpc/grpc-js'
import { HealthImplementation } from 'grpc-health-check'

import { ExternalProcessor, refusal, type ProcessingRequest__Output as Message, type ProcessingResponse as Reply } from './envoy.js'
import { Exchange } from './exchange.js'
import { Picker, type PickerOptions } from './picker.js'

/** What a server is made of. */
export interface ServerOptions extends PickerOptions {
  /** `host:port`; port 0 lets the system choose. */
  listen: string
  /** Largest request body in bytes (default 32 MiB). */
  maxBody?: number
}

/** A running endpoint picker. */
export interface PickerServer {
  picker: Picker
  port: number
  /** Says that nothing new is wanted, lets open requests finish for so long, and ends. */
  stop(graceMs?: number): Promise<void>
}

type Stream = ServerDuplexStream<Message, Reply>

/** Names under which gateways ask for health. */
const SERVICES = ['', 'liveness', 'readiness', ExternalProcessor.service.Process.path.split('/')[1] ?? '']

export async function serve({ listen, maxBody = 32 * 2 ** 20, ...options }: ServerOptions): Promise<PickerServer> {
  const picker = new Picker(options)
  const health = new HealthImplementation(Object.fromEntries(SERVICES.map((name) => [name, 'SERVING'])))
  // In buffered mode the whole body is one message.
  const server = new Server({ 'grpc.max_receive_message_length': maxBody + 65_536, 'grpc.max_send_message_length': -1 })
  server.addService(ExternalProcessor.service, { Process: (stream: Stream) => void converse(stream, picker, maxBody) })
  health.addToServer(server)
  const port = await new Promise<number>((resolve, reject) => {
    server.bindAsync(listen, ServerCredentials.createInsecure(), (error, bound) => (error ? reject(error) : resolve(bound)))
  })
  return {
    picker,
    port,
    async stop(graceMs = 0) {
      for (const name of SERVICES) if (name !== 'liveness') health.setStatus(name, 'NOT_SERVING')
      const impatient = setTimeout(() => server.forceShutdown(), graceMs)
      await new Promise<void>((resolve) => server.tryShutdown(() => resolve()))
      clearTimeout(impatient)
      picker.close()
    },
  }
}

/** Serves one HTTP request. Envoy resets the stream at the end of each, so that is no error. */
async function converse(stream: Stream, picker: Picker, maxBody: number): Promise<void> {
  const left = new AbortController()
  stream.on('cancelled', () => left.abort())
  stream.on('error', () => left.abort())
  const exchange = new Exchange(picker, { maxBody, signal: left.signal })
  try {
    // Otherwise the loop destroys the stream at its end, with what is still to be sent.
    for await (const message of stream.iterator({ destroyOnReturn: false })) {
      for (const reply of await exchange.receive(message as Message)) {
        if (!stream.write(reply)) await once(stream, 'drain', { signal: left.signal })
      }
      if (exchange.over) break
    }
  } catch (error) {
    if (!left.signal.aborted && !stream.destroyed) {
      console.error('kvlane: a request could not be placed:', error)
      stream.write(refusal(500, 'internal', 'the endpoint picker failed; its log says why'))
    }
  } finally {
    exchange.end()
    stream.end()
  }
}
