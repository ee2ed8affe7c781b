// Envoy's messages: what an endpoint picker reads from them and writes into them.

import { isIP } from 'node:net'
import { fileURLToPath } from 'node:url'

import { loadPackageDefinition } from '@grpc/grpc-js'
import { loadSync } from '@grpc/proto-loader'
import { errorBody } from 'kvlane/gateway'

import type { HeaderMap__Output } from './generated/envoy/service/ext_proc/v3/HeaderMap.js'
import type { HeaderMutation } from './generated/envoy/service/ext_proc/v3/HeaderMutation.js'
import type { Metadata__Output } from './generated/envoy/service/ext_proc/v3/Metadata.js'
import type { ProcessingResponse } from './generated/envoy/service/ext_proc/v3/ProcessingResponse.js'
import type { ProtoGrpcType } from './generated/ext_proc.js'
import type { Value__Output } from './generated/google/protobuf/Value.js'

export type { ProcessingRequest__Output } from './generated/envoy/service/ext_proc/v3/ProcessingRequest.js'
export type { BodySendMode__Output } from './generated/envoy/service/ext_proc/v3/BodySendMode.js'
export type { ProcessingResponse }

const PROTO = fileURLToPath(new URL('../../proto/ext_proc.proto', import.meta.url))
const loaded = loadPackageDefinition(loadSync(PROTO, { longs: Number, enums: String, oneofs: true }))

/** The service that Envoy calls, and its client for tests. */
export const { ExternalProcessor } = (loaded as unknown as ProtoGrpcType).envoy.service.ext_proc.v3

/** Where the request goes: this header and this key of the dynamic metadata, always equal. */
export const DESTINATION = 'x-gateway-destination-endpoint'
/** Where Envoy tells which endpoint answered in the end. */
export const SERVED = 'x-gateway-destination-endpoint-served'
const SUBSET = 'x-gateway-destination-endpoint-subset'

/** Longest piece of a body in one message: Envoy accepts up to 64 KiB. */
const MAX_PIECE = 62_000

/** Returns a header, its name in lower case. */
export function header(map: HeaderMap__Output | undefined, name: string): string | undefined {
  const found = map?.headers?.find(({ key }) => key === name)
  return found && (found.rawValue?.length ? found.rawValue.toString('latin1') : (found.value ?? ''))
}

/** Returns the endpoints that the gateway allows; nothing when it allows all. */
export function subsetOf(metadata: Metadata__Output | undefined): string[] | undefined {
  return endpoints(metadata?.filterMetadata?.['envoy.lb.subset_hint']?.fields?.[SUBSET])
}

/** Returns the endpoint that answered, as far as Envoy tells. */
export function servedBy(metadata: Metadata__Output | undefined): string | undefined {
  return endpoints(metadata?.filterMetadata?.['envoy.lb']?.fields?.[SERVED])?.[0]
}

/** A list of endpoints; some gateways send one string with commas. */
function endpoints(value: Value__Output | undefined): string[] | undefined {
  if (value === undefined) return undefined
  const texts = value.listValue ? (value.listValue.values ?? []).map((item) => item.stringValue ?? '') : [value.stringValue ?? '']
  return texts.flatMap((text) => text.split(',')).flatMap((text) => canonicalEndpoint(text.trim()) ?? [])
}

/** Writes `IP:port` in the one form in which endpoints are compared; nothing for anything else. */
export function canonicalEndpoint(text: string): string | undefined {
  const [, address = '', port = ''] = text.match(/^(\[.*\]|[^:]*):(\d{1,5})$/) ?? []
  const bare = address.replace(/^\[(.*)\]$/, '$1')
  const family = isIP(bare)
  if (family === 0 || (family === 6) !== address.startsWith('[') || Number(port) < 1 || Number(port) > 65_535) return undefined
  return `${new URL(`http://${address}`).hostname}:${Number(port)}`
}

/** What sends a request on: the destination in header and metadata, nothing that a client made up. */
export function destination(to: string): { mutation: HeaderMutation; metadata: NonNullable<ProcessingResponse['dynamicMetadata']> } {
  return {
    mutation: {
      setHeaders: [{ header: { key: DESTINATION, rawValue: Buffer.from(to) }, appendAction: 'OVERWRITE_IF_EXISTS_OR_ADD' }],
      removeHeaders: [SERVED],
    },
    metadata: { fields: { 'envoy.lb': { structValue: { fields: { [DESTINATION]: { stringValue: to } } } } } },
  }
}

/** Cuts a body into the pieces of full-duplex streaming; `last` ends the stream, if need be with an empty piece. */
export function pieces(body: Buffer, last: boolean): Array<{ body: Buffer; endOfStream: boolean }> {
  const cut: Array<{ body: Buffer; endOfStream: boolean }> = []
  for (let at = 0; at < body.length; at += MAX_PIECE) cut.push({ body: body.subarray(at, at + MAX_PIECE), endOfStream: false })
  if (last && cut.length === 0) cut.push({ body, endOfStream: false })
  return cut.map((piece, index) => ({ ...piece, endOfStream: last && index === cut.length - 1 }))
}

/** An answer of our own, in the shape of OpenAI's errors. Envoy sends it to the client and forgets the stream. */
export function refusal(status: number, code: string, message: string): ProcessingResponse {
  return {
    immediateResponse: {
      status: { code: status },
      headers: { setHeaders: [{ header: { key: 'content-type', rawValue: Buffer.from('application/json') }, appendAction: 'OVERWRITE_IF_EXISTS_OR_ADD' }] },
      body: Buffer.from(errorBody(status, code, message)),
      details: `kvlane_${code}`,
    },
  }
}
