"""Chat templates of the forms that published models have."""

from dataclasses import dataclass

from raylens.checkpoints import BUNDLED_MODEL
from raylens.preprocess.models.wemm import _CHAT_TEMPLATE as WEMM
from tests.preprocess.small_processors import FAMILIES, family_chat_template

SHAPES = (BUNDLED_MODEL / "chat_template.jinja").read_text()


@dataclass(frozen=True)
class Template:
    """`list_roles`: the roles whose content has to be a list of parts. `writes_pictures`: the template puts `<image>`
    into the text for a picture."""

    text: str
    list_roles: frozenset[str] = frozenset()
    writes_pictures: bool = False


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_OF_PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% elif 'text' in part %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_WITH_TOOLS = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' and message.tool_calls %}{{- '<|im_start|>assistant' }}"
    "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"
    "{%- for call in message.tool_calls %}{{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + message.content }}"
    "{{- '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LAST_SYSTEM = (  # as of DeepSeek R1
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ bos_token + ns.system }}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<User>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<Assistant>' + m.content + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '<Tool>' + m.content }}{% endif %}{% endfor %}"
)
GEMMA_3 = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' %}{% if loop.first %}{% set text = bos_token + text %}{% endif %}"
    "{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] + ' ' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}"
    "{% else %}{{ 'USER: ' + m['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
PRINTED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SPLIT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ '<' ~ m.role ~ '>' ~ m.content }}{% endif %}{% endfor %}"
)
LLAVA = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
FIRST_PART = "{% for m in messages %}{{ m.role }}: {{ m.content[0]['text'] }}{% endfor %}"
LISTS_FROM_USERS = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {% for part in m.content %}"
    "{% if part.type == 'image' %}<image>\n{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% else %}{{ m.role + ': ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}"
    "{%- for m in rest %}{%- if m['role'] == 'user' %}{{- '[INST]' }}"
    "{%- if loop.last and system is defined %}{{- system + '\n\n' }}{%- endif %}"
    "{%- if m['content'] is string %}{{- m['content'] }}{%- else %}{%- for part in m['content'] %}"
    "{{- part['text'] if part['type'] == 'text' else '<image>' }}{%- endfor %}{%- endif %}{{- '[/INST]' }}"
    "{%- elif m['tool_calls'] is defined %}{%- for call in m['tool_calls'] %}"
    "{%- if call.id | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}"
    "{{- '[TOOL_CALLS]' + call.function | tojson }}{%- endfor %}{{- eos_token }}"
    "{%- elif m['role'] == 'tool' %}{{- '[TOOL_RESULTS]' + m['content'] + '[/TOOL_RESULTS]' }}"
    "{%- else %}{{- m['content'] + eos_token }}{%- endif %}{%- endfor %}"
)

_EVERYBODY = frozenset({"user", "system", "assistant", "tool"})
TEMPLATES = {
    "chatml": Template(CHATML),
    "chatml of parts": Template(CHATML_OF_PARTS, writes_pictures=True),
    "chatml with the system first": Template(CHATML_FIRST_SYSTEM),
    "chatml with tools": Template(CHATML_WITH_TOOLS),
    "llama 2": Template(LLAMA_2),
    "gemma 3": Template(GEMMA_3),
    "last system": Template(LAST_SYSTEM),
    "llama 3": Template(LLAMA_3),
    "vicuna": Template(VICUNA),
    "printed": Template(PRINTED),
    "split": Template(SPLIT),
    "llava": Template(LLAVA, _EVERYBODY, writes_pictures=True),
    "first part": Template(FIRST_PART, _EVERYBODY),
    "lists from users": Template(LISTS_FROM_USERS, frozenset({"user"}), writes_pictures=True),
    "mistral": Template(MISTRAL, writes_pictures=True),
    "shapes": Template(SHAPES, writes_pictures=True),
    "wemm": Template(WEMM, writes_pictures=True),
}
_OF_FAMILIES = {family_chat_template(name): name for name in FAMILIES}
TEMPLATES |= {name: Template(text, writes_pictures="<image>" in text) for text, name in _OF_FAMILIES.items()}
