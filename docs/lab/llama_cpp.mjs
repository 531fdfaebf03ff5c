// Time greedy decoding in llama.cpp, like other_engines.py:
//   npm install node-llama-cpp; node llama_cpp.mjs MODEL.gguf out/prompts.json THREADS
import fs from "fs";
import { getLlama } from "node-llama-cpp";

const [, , gguf, path, threads] = process.argv;
const llama = await getLlama({ gpu: false, maxThreads: Number(threads), build: "never" });
const model = await llama.loadModel({ modelPath: gguf });
const context = await model.createContext({ contextSize: 1024, threads: Number(threads) });
const runs = JSON.parse(fs.readFileSync(path));

async function decode(ids, count) {
  const sequence = context.getSequence();
  const out = [];
  for await (const token of sequence.evaluate(ids, { temperature: 0, yieldEogToken: true })) {
    out.push(token);
    if (out.length >= count) break;
  }
  await sequence.dispose();
  return out;
}

await decode(runs[0][0], 8);
const start = performance.now();
let tokens = 0, equal = 0;
for (const [ids, expected] of runs) {
  const out = await decode(ids, 64);
  tokens += out.length;
  equal += JSON.stringify(out) === JSON.stringify(expected);
}
const seconds = (performance.now() - start) / 1e3;
console.log(`llama.cpp: ${(tokens / seconds).toFixed(1)} tokens/s, ${equal}/${runs.length} outputs equal`);
process.exit(0);
