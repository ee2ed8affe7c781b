'use strict'

const net = require('node:net')

const GREETING = Buffer.alloc(64)
GREETING[0] = 0xff
GREETING[9] = 0x7f
GREETING[10] = 3
GREETING.write('NULL', 12)

const READY = frame(4, Buffer.concat([name('READY'), name('Socket-Type'), Buffer.of(0, 0, 0, 3), Buffer.from('PUB')]))

/** As much of a ZeroMQ publisher as an engine's event stream needs (ZMTP 3.0, no security). */
class Publisher {
  #server = net.createServer((socket) => this.#accept(socket))
  /** The batch, if any, that each subscriber gets first. */
  #first
  /** Every connection, and those that have shaken hands. */
  #open = new Set()
  #ready = new Set()

  constructor(first) {
    this.#first = first
  }

  /** Starts to listen. Returns the endpoint. */
  async start(port = 0) {
    await new Promise((resolve) => this.#server.listen(port, '127.0.0.1', resolve))
    return `tcp://127.0.0.1:${this.#server.address().port}`
  }

  publish(seq, payload) {
    for (const socket of this.#ready) socket.write(message(seq, payload))
  }

  async stop() {
    for (const socket of this.#open) socket.destroy()
    await new Promise((resolve) => this.#server.close(resolve))
  }

  #accept(socket) {
    socket.on('error', () => {})
    this.#open.add(socket)
    socket.on('close', () => {
      this.#open.delete(socket)
      this.#ready.delete(socket)
    })
    socket.write(GREETING)
    let greeted = 0
    socket.on('data', (data) => {
      // After the peer's greeting its commands and subscriptions are of no interest: everybody gets everything.
      greeted += data.length
      if (greeted > 64 && !this.#ready.has(socket)) {
        socket.write(READY)
        if (this.#first) socket.write(message(...this.#first))
        this.#ready.add(socket)
      }
    })
  }
}

function message(seq, payload) {
  const number = Buffer.alloc(8)
  number.writeBigUInt64BE(BigInt(seq))
  return Buffer.concat([frame(1, Buffer.alloc(0)), frame(1, number), frame(0, payload)])
}

function frame(flags, body) {
  const head = Buffer.alloc(9, flags | 2)
  head.writeBigUInt64BE(BigInt(body.length), 1)
  return Buffer.concat([head, body])
}

function name(text) {
  return Buffer.concat([Buffer.of(text.length), Buffer.from(text)])
}

module.exports = { Publisher }
