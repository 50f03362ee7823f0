// A client of an expert server in another language, written from experts.proto alone: one forward, one training step.
//
//     npm install && node client.mjs 127.0.0.1:31330 ffn.0
//
// The expert takes one tensor of rows of float32 numbers, and returns one likewise.
import { randomUUID } from "node:crypto";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const PROTO = fileURLToPath(new URL("../../src/torchweft/experts/wire/experts.proto", import.meta.url));
const options = { keepCase: true, enums: String, longs: Number, defaults: true };
const { torchweft } = grpc.loadPackageDefinition(protoLoader.loadSync(PROTO, options));
const Fault = protobuf.loadSync(PROTO).lookupType("torchweft.Fault");

const [address, uid] = process.argv.slice(2);
const client = new torchweft.Experts(address, grpc.credentials.createInsecure());

/** Tensors one after the other, each from the next multiple of 16 bytes on. */
function packed(tensors) {
  return Buffer.concat(
    tensors.map(({ numbers }) => {
      const bytes = Buffer.from(numbers.buffer, numbers.byteOffset, numbers.byteLength);
      return Buffer.concat([bytes, Buffer.alloc(-bytes.length & 15)]);
    }),
  );
}

/** A frame with one call. */
function frame(call, tensors = []) {
  const described = tensors.map(({ shape }) => ({ dtype: "float32", shape }));
  return { header: { calls: [{ call_id: 1, client: "node", ...call, tensors: described }] }, body: packed(tensors) };
}

/** The first call of an answer, with its tensors; raises what the server answered. */
function read({ header, body }) {
  const call = header.calls[0];
  if (call.kind === "ERROR") {
    throw new Error(Fault.toObject(Fault.decode(call.data), { enums: String }).code);
  }
  let offset = 0;
  call.tensors = call.tensors.map(({ shape }) => {
    const count = shape.reduce((product, size) => product * size, 1);
    const numbers = new Float32Array(new Uint8Array(body.subarray(offset, offset + 4 * count)).buffer);
    offset += (4 * count + 15) & ~15;
    return { shape, numbers };
  });
  return call;
}

/** A unary call for the description of the expert. */
function info() {
  return new Promise((resolve, reject) =>
    client.Info(frame({ kind: "INFO", uid }), (error, answer) => (error ? reject(error) : resolve(read(answer)))),
  );
}

/** Calls over one stream, one after the other. */
async function main() {
  const { max_batch_size, args } = JSON.parse((await info()).data.toString());
  const width = args.tuple[0].spec[0][1];
  console.log(`${uid} takes rows of ${width} numbers, at most ${max_batch_size} at a time`);
  const stream = client.Stream();
  const ask = (request) =>
    new Promise((resolve, reject) => {
      stream.once("data", (answer) => {
        try {
          resolve(read(answer));
        } catch (error) {
          reject(error);
        }
      });
      stream.write(request);
    });
  const inputs = { shape: [2, width], numbers: Float32Array.from({ length: 2 * width }, (_, i) => i / 10) };
  const key = randomUUID(); // of the forward and its backward: by it a repeated backward steps once
  const forward = await ask(frame({ kind: "FORWARD", uid, key }, [inputs]));
  console.log("outputs", JSON.stringify([...forward.tensors[0].numbers]));
  const ones = { shape: forward.tensors[0].shape, numbers: new Float32Array(forward.tensors[0].numbers.length).fill(1) };
  const backward = await ask(frame({ kind: "BACKWARD", uid, key }, [inputs, ones]));
  console.log("gradients", JSON.stringify([...backward.tensors[0].numbers]));
  console.log("steps", backward.step);
  try {
    await ask(frame({ kind: "FORWARD", uid: "nobody" }, [inputs]));
  } catch (error) {
    console.log("refused", error.message);
  }
  stream.end();
  client.close();
}

await main();
